"""Analysis: effects with intervals, metrics, claims, and the papers' published figures."""
