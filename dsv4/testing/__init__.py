"""What tests need: assertions without pytest, and Hypothesis strategies."""
