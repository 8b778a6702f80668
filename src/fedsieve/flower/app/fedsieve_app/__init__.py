"""fedsieve as a Flower app."""
