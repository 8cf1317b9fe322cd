"""Dispatch sends rows to the ranks of their experts; combine brings the results back."""
