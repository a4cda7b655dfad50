"""Which method has trained a model first, on links of several rates and round trips."""
