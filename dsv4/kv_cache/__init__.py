"""The paged KV cache: pages, page tables, entry layouts, batches, and steps with undo."""
