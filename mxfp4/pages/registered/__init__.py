"""The registered study on the pages: costs, verdicts, curves, the answer."""
