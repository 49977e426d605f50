"""OpenAI's SDK against a server: python openai_sdk.py URL MODEL. Runs where ``openai`` is installed, and nothing of ours."""

import json
import sys

from openai import BadRequestError, OpenAI

PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 20}, "open": {"type": "boolean"}},
    "required": ["place", "open"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Context:\nThe library opens at nine.\n\nQuestion: When does the library open?"}]


def main() -> None:
    """Prints a line for each thing tried; ends with an error where one is not as it should be."""
    client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)
    model = sys.argv[2]
    assert model in [card.id for card in client.models.list()]
    print("models: listed")

    whole = client.chat.completions.create(model=model, messages=ASKED, temperature=0, max_tokens=40)
    text = whole.choices[0].message.content
    print(f"chat: {text!r}, {whole.usage.completion_tokens} tokens, {whole.choices[0].finish_reason}")
    assert text and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    for speculation in ({}, {"max_draft_tokens": 0}):
        streamed, usage = "", None
        with client.chat.completions.create(
            model=model, messages=ASKED, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True},
            extra_body={"speculation": speculation},
        ) as stream:  # fmt: skip
            for chunk in stream:
                streamed += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
        assert streamed == text, (streamed, text)
        assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    print("stream: the same text and usage, with speculation and without")

    choices = client.chat.completions.create(
        model=model, messages=ASKED, n=3, seed=7, temperature=1.0, max_tokens=12, logprobs=True, top_logprobs=2
    ).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert all(len(entry.top_logprobs) == 2 for choice in choices for entry in choice.logprobs.content)
    print("n=3 with log-probabilities: three choices")

    completion = client.completions.create(model=model, prompt=["One.", "Two."], max_tokens=8, logprobs=1, temperature=0)
    assert [choice.index for choice in completion.choices] == [0, 1]
    print("completions: two prompts")

    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    structured = client.chat.completions.create(model=model, messages=ASKED, response_format=schema, max_tokens=400, seed=1)
    place = json.loads(structured.choices[0].message.content)
    print(f"json_schema: {place}")
    assert place.keys() == PLACE["properties"].keys()

    try:
        client.chat.completions.create(model=model, messages=ASKED, max_tokens=8, extra_body={"no_such_field": 1})
    except BadRequestError as error:
        refused = error.param
    else:
        refused = None
    print(f"an unknown field: refused, param {refused!r}")
    assert refused == "no_such_field"


if __name__ == "__main__":
    main()
