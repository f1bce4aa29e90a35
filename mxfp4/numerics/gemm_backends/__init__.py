"""Who multiplies packed operands: the back ends, the check that each must pass on a device, and the choice."""
