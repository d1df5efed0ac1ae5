"""Episodes that an agent harness outside of headrace plays, by talking to the policy as to any OpenAI endpoint."""
