"""Recording what a call launches and allocates, and doing it again."""
