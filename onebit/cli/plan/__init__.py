"""`onebit plan`: steps on a cluster that is not at hand."""
