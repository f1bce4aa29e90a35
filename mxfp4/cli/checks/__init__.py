"""What works on this machine, and what a plan will take."""
