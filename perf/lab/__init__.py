"""The network lab: hosts on one machine, connected by links of a given rate."""
