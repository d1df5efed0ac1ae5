"""What a model is shown so that it imitates it: chats as people store them, and the traces that are made of them."""
