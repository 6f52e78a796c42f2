"""Tests, in the folders of the package; `_tools` has what tests share and what is run by hand."""
