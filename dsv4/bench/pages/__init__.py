"""Pages and charts that ``python -m dsv4.bench report`` writes from files of results."""
