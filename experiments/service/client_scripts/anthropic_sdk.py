"""Anthropic's SDK against a server: python anthropic_sdk.py URL MODEL. Runs where ``anthropic`` is installed."""

import sys

from anthropic import Anthropic, BadRequestError, NotFoundError

ASKED = [{"role": "user", "content": "Context:\nThe library opens at nine.\n\nQuestion: When does the library open?"}]
HOURS = {
    "name": "opening_hours",
    "description": "When a place opens.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string", "maxLength": 20}}, "required": ["place"]},
}


def main() -> None:
    """Prints a line for each thing tried; ends with an error where one is not as it should be."""
    client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
    options = {"model": sys.argv[2], "max_tokens": 40, "messages": ASKED, "extra_body": {"temperature": 0}}

    whole = client.messages.create(**options)
    text = whole.content[0].text
    print(f"messages: {text!r}, {whole.usage.output_tokens} tokens, {whole.stop_reason}")
    assert text and whole.stop_reason == "end_turn"

    for speculation in ({}, {"max_draft_tokens": 0}):
        with client.messages.stream(**options | {"extra_body": {"temperature": 0, "speculation": speculation}}) as stream:
            streamed = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert (streamed, last.usage.output_tokens) == (text, whole.usage.output_tokens), (streamed, text)
    print("stream: the same text and usage, with speculation and without")

    counted = client.messages.count_tokens(model=sys.argv[2], messages=ASKED).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    print(f"count_tokens: {counted}, as in the usage")

    try:
        called = client.messages.create(
            **options | {"max_tokens": 400}, tools=[HOURS], tool_choice={"type": "tool", "name": "opening_hours"}
        )
    except BadRequestError as error:
        print(f"tools: refused, {error.body['error']['message']}")
        if "chat template does not show tools" not in str(error):
            raise
    else:
        use = next(block for block in called.content if block.type == "tool_use")
        print(f"tools: {use.name}({use.input}), {called.stop_reason}")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "nine"}
        turns = [*ASKED, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        told = client.messages.create(**options | {"messages": turns}, tools=[HOURS])
        print(f"tool result: {[block.type for block in told.content]}, {told.stop_reason}")

    try:
        client.messages.create(**options | {"model": "no-such-model"})
    except NotFoundError as error:
        refused = error.body["error"]["type"]
    else:
        refused = None
    print(f"another model: refused, {refused}")
    assert refused == "not_found_error"


if __name__ == "__main__":
    main()
