"""Operator routes below ``/admin``. In: requests with an admin key. Out: cache contents, audit results, comparisons."""
