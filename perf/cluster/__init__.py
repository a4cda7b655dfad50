"""The cluster model of `onebit plan` against what was measured."""
