"""When each way of sending gradients wins: parameter servers, slow links, and what a model loses that is told less."""
