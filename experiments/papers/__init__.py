"""Tables and figures of five papers, measured locally. In: prompts. Out: tables and statements compared with the papers."""
