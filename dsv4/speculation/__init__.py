"""Speculative decoding: drafts of several tokens, and their verification in one step."""
