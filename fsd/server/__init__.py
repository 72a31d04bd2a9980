"""`fsd serve`: HTTP around `fsd.service`. Routes only translate; uvicorn and Starlette live here alone."""
