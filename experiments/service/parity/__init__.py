"""Drafts on beside drafts off, parameter by parameter. In: a server. Out: the differences."""
