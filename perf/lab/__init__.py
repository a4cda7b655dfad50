"""The network lab: hosts on one machine, joined by links of a given rate."""
