"""LiteLLM against a server: python litellm_chat.py URL MODEL. Runs where ``litellm`` is installed."""

import json
import sys

import litellm
from litellm import BadRequestError, completion

ASKED = {"role": "user", "content": "Context:\nThe library opens at nine.\n\nQuestion: When does the library open?"}
HOURS = {
    "type": "function",
    "function": {
        "name": "opening_hours",
        "description": "When a place opens.",
        "parameters": {
            "type": "object",
            "properties": {
                "places": {"type": "array", "items": {"type": "string", "maxLength": 9}, "uniqueItems": True, "maxItems": 2}
            },
            "required": ["places"],
        },
    },
}


def main() -> None:
    """Prints a line for each thing tried; ends with an error where one is not as it should be."""
    options = {"model": f"openai/{sys.argv[2]}", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0}
    answer = completion(messages=[ASKED], max_tokens=40, **options)
    text = answer.choices[0].message.content
    chunks = list(completion(messages=[ASKED], max_tokens=40, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    print(f"chat: {text!r}, the same in {len(chunks)} chunks")

    again = completion(messages=[ASKED, answer.choices[0].message.model_dump(), ASKED], max_tokens=8, **options)
    print(f"history: {again.choices[0].message.content!r}")
    for most in (400, 12):  # whole, and cut within the call
        try:
            called = completion(messages=[ASKED], tools=[HOURS], tool_choice="required", max_tokens=most, **options)
        except BadRequestError as error:
            print(f"tools: refused, {str(error)[:200]}")
            if "chat template does not show tools" not in str(error):
                raise
            return
        message = called.choices[0].message
        rebuilt = (
            litellm.stream_chunk_builder(
                list(completion(messages=[ASKED], tools=[HOURS], tool_choice="required", max_tokens=most, stream=True, **options))
            )
            .choices[0]
            .message
        )
        print(f"tools, {most} tokens: {message.tool_calls}")
        for turn in (message, rebuilt):
            results = [
                {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": json.dumps({"error": "none"})}
                for call in turn.tool_calls or ()
            ]
            told = completion(messages=[ASKED, turn.model_dump(), *results], tools=[HOURS], max_tokens=8, **options)
            assert told.choices[0].message
    print("tools: calls, cut ones too, are taken back whole and streamed")


if __name__ == "__main__":
    main()
