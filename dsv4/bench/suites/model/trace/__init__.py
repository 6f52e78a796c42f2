"""Map of a captured decode step: its launches, what each waits for, and the critical path."""
