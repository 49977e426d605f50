"""instructor against a server: python instructor_models.py URL MODEL. Runs where ``instructor`` is installed."""

import sys

import instructor
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field, field_validator

ASKED = [{"role": "user", "name": "reader", "content": "Context:\nThe library opens at nine.\n\nQuestion: When does it open?"}]
REFUSALS: list[str] = []


class Place(BaseModel):
    """A place, refused the first time, so that instructor sends the failed answer back and asks again."""

    place: str = Field(max_length=20)
    tags: set[str] = Field(max_length=2)
    is_open: bool

    @field_validator("is_open")
    @classmethod
    def _refuse_once(cls, value: bool) -> bool:
        if not REFUSALS:
            REFUSALS.append("is_open")
            raise ValueError("is_open must be certain")
        return value


def main() -> None:
    """Prints a line for each mode; ends with an error where one is not as it should be."""
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON):
        REFUSALS.clear()
        client = instructor.from_openai(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0), mode=mode)
        try:
            place = client.chat.completions.create(
                model=sys.argv[2], messages=ASKED, response_model=Place, max_retries=4, max_tokens=400, temperature=0.0
            )
        except Exception as error:
            cause = error.__cause__ if isinstance(error.__cause__, BadRequestError) else error
            print(f"{mode.name}: {type(cause).__name__}, {' '.join(str(cause).split())[-200:]}")
            known = ("chat template does not show tools", "uniqueItems", "validation error", "max_tokens length limit")
            if not any(text in str(cause) for text in known):
                raise
        else:
            print(f"{mode.name}: {place!r}, after {len(REFUSALS)} refusal")


if __name__ == "__main__":
    main()
