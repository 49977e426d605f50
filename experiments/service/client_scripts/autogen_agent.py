"""An AutoGen agent with a tool against a server: python autogen_agent.py URL MODEL. Runs where ``autogen-ext`` is installed."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import BadRequestError

ASKED = "Context:\nThe library opens at nine.\n\nQuestion: When does the library open?"


async def opening_hours(place: str) -> str:
    """When a place opens; it fails."""
    raise ValueError(f"{place[:9]} is unknown")


async def main() -> None:
    """Prints a line for each thing tried; ends with an error where one is not as it should be."""
    info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model=sys.argv[2], base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0, max_tokens=100,
        include_name_in_message=True, model_info=info,
    )  # fmt: skip
    for tools in ([], [opening_hours]):
        agent = AssistantAgent("librarian", client, tools=tools, reflect_on_tool_use=True)
        try:
            for _ in range(2):  # the second question has the first turn, with its failed calls, as history
                result = await agent.run(task=ASKED)
                print(f"{len(tools)} tools: {[type(message).__name__ for message in result.messages]}")
        except BadRequestError as error:
            print(f"{len(tools)} tools: refused, {str(error)[:200]}")
            if "chat template does not show tools" not in str(error):
                raise
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
