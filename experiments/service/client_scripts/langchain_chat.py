"""LangChain's chat class against a server: python langchain_chat.py URL MODEL. Runs where ``langchain-openai`` is installed."""

import asyncio
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel, Field

ASKED = "Context:\nThe library opens at nine.\n\nQuestion: When does the library open?"


class Place(BaseModel):
    """A place with opening hours."""

    place: str = Field(max_length=20)
    is_open: bool


@tool
def opening_hours(place: str) -> str:
    """When a place opens."""
    return f"{place}: nine"


def main() -> None:
    """Prints a line for each thing tried; ends with an error where one is not as it should be."""
    chat = ChatOpenAI(
        base_url=f"{sys.argv[1]}/v1", api_key="none", model=sys.argv[2], temperature=0, max_tokens=400, max_retries=0
    )
    answer = chat.invoke(ASKED)
    print(f"invoke: {answer.content!r}, {answer.usage_metadata['output_tokens']} tokens")
    assert answer.content

    chunks = list(chat.stream(ASKED))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    print(f"stream: the same text in {len(chunks)} chunks")

    async def several() -> list[str]:
        return [answer.content for answer in await chat.abatch([ASKED] * 4)]

    assert asyncio.run(several()) == [answer.content] * 4
    print("abatch: the same text four times")

    place = chat.with_structured_output(Place, method="json_schema").invoke(ASKED)
    assert isinstance(place, Place)
    print(f"with_structured_output: {place!r}")

    try:
        called = chat.bind_tools([opening_hours]).invoke(ASKED)
    except BadRequestError as error:
        refusal = str(error)
        print(f"bind_tools: refused, {refusal}")
        if "chat template does not show tools" not in refusal:
            raise
    else:
        print(f"bind_tools: {len(called.tool_calls)} calls, {called.content!r}")
        assert called.content or called.tool_calls


if __name__ == "__main__":
    main()
