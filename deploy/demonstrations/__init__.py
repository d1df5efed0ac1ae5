"""Where a supervised stage gets its traces: chats in a file, stored episodes, or an environment's demonstrator."""
