"""Checks of results: float64 oracles, tolerances, and a judge per operator."""
