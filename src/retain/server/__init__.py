"""An engine over HTTP, as OpenAI's clients know it: `retain serve`. What is not known here: slots, pages, steps."""
