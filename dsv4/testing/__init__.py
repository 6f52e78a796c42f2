"""Helpers for tests: assertions without pytest, and Hypothesis strategies."""
