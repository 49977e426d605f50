"""Draft budget: which rows to draft, and how many. In: candidates with chances, step times. Out: a draft tree that pays off."""
