"""MJSD's paper (arXiv 2407.09722): drafts of a second model. In: two models. Out: tables beside the paper's."""
