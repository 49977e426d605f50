"""LlamaIndex's class for servers with OpenAI's API: python llama_index_chat.py URL MODEL.

Runs where ``llama-index-llms-openai-like`` is installed.
"""

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from pydantic import BaseModel, Field

ASKED = [ChatMessage(role="user", content="Context:\nThe library opens at nine.\n\nQuestion: When does the library open?")]


class Place(BaseModel):
    """A place with opening hours."""

    place: str = Field(max_length=20)
    is_open: bool


def opening_hours(place: str) -> str:
    """When a place opens."""
    return f"{place}: nine"


def main() -> None:
    """Prints a line for each thing tried; ends with an error where one is not as it should be."""
    options = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "model": sys.argv[2], "temperature": 0, "max_retries": 0}
    llm = OpenAILike(
        is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True, max_tokens=400, **options
    )
    answer = llm.chat(ASKED)
    text = answer.message.content
    print(f"chat: {text!r}, {answer.raw.usage.completion_tokens} tokens")
    assert text

    for speculation in ({}, {"max_draft_tokens": 0}):
        chunks = list(llm.stream_chat(ASKED, extra_body={"speculation": speculation}))
        assert chunks[-1].message.content == "".join(chunk.delta or "" for chunk in chunks) == text
    print("stream_chat: the same text, with speculation and without")

    async def several() -> list[str]:
        answers = await asyncio.gather(*(llm.achat(ASKED) for _ in range(4)))
        return [answer.message.content for answer in answers]

    assert asyncio.run(several()) == [text] * 4
    print("achat: the same text four times")

    completed = OpenAILike(is_chat_model=False, max_tokens=12, **options).complete("The library opens at").text
    print(f"complete: {completed!r}")
    assert completed

    place = llm.as_structured_llm(Place).chat(ASKED).raw
    print(f"as_structured_llm: {place!r}")
    assert isinstance(place, Place)

    try:
        called = llm.chat_with_tools([FunctionTool.from_defaults(opening_hours)], chat_history=ASKED)
    except BadRequestError as error:
        print(f"chat_with_tools: refused, {error.message}")
        if "chat template does not show tools" not in error.message:
            raise
    else:
        calls = llm.get_tool_calls_from_response(called, error_on_no_tool_call=False)
        print(f"chat_with_tools: {len(calls)} calls, {called.message.content!r}")
        assert calls or called.message.content


if __name__ == "__main__":
    main()
