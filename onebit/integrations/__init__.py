"""Other people's training loops: an optimizer is attached in them, and synchronized before they save it.

    onebit.integrations.transformers    OneBitTrainer     HuggingFace's Trainer
    onebit.integrations.lightning       OneBitCallback    Lightning's Trainer
    onebit.integrations.accelerate      attach            a loop with an Accelerator
    onebit.integrations.torchft         OptimizerWrapper  replicas that come and go, by the quorum of torchft

Each imports its own package, and nothing imports these.
"""
