"""All forms of attack."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.service.attacks import connection_forms, generating, text_forms
from experiments.service.attacks.form import Form

_KINDS = (
    generating.log_probabilities, generating.bodies, connection_forms.heads, text_forms.texts, text_forms.files,
    generating.grammars, generating.resumed_streams, connection_forms.admin_port, connection_forms.probes,
    generating.streams_and_memory, connection_forms.connections,
)  # fmt: skip


def all_forms() -> list[Form]:
    """Return all of them, those of a kind one after the other."""
    return [form for kind in _KINDS for form in kind()]


def chosen(names: Sequence[str]) -> list[Form]:
    """Return the forms whose titles contain one of some texts; all where there is none.

    Raises:
        ValueError: a text is in no title.
    """
    forms = all_forms()
    for name in names:
        if not any(name in form.title for form in forms):
            raise ValueError(f"--only {name!r} is in no title: {', '.join(form.title for form in forms)}")
    return [form for form in forms if not names or any(name in form.title for name in names)]
