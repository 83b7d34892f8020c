"""RabbitMQ as the message broker; needs pika, the extra `rabbitmq`.

Start with `broker`: confirmed sends that are repeated on a new connection. `consumer` reads messages safely.
`delay_queues` contain messages that are due later than in a minute. `bulk` publishes many messages in one transaction.
`errors` translates pika's errors.
"""
