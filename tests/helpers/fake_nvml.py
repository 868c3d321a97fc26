"""A module that stands in for pynvml, with boards of one kind."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class Nvml:
    """One kind of board; `refuses` names functions that fail on it."""

    NVMLError, NVML_TEMPERATURE_GPU = NVMLError, 0

    def __init__(self, memory_temperature=70, refuses=(), load=97, power=650_500):
        self.refuses, self.asked, temperature = (
            refuses,
            [],
            SimpleNamespace(uiVal=memory_temperature),
        )
        self.answers = {
            "nvmlDeviceGetHandleByIndex": lambda index: f"index {index}",
            "nvmlDeviceGetHandleByUUID": lambda identity: f"identity {identity}",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
                used=60 * 2**30, total=80 * 2**30
            ),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=load),
            "nvmlDeviceGetPowerUsage": lambda handle: power,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 55,
            "nvmlDeviceGetFieldValues": lambda handle, numbers: [
                SimpleNamespace(nvmlReturn=0, value=temperature)
            ],
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: (
                0x4 | 0x1 | 0x40
            ),
        }

    def __getattr__(self, name):
        if name not in self.answers or name in self.refuses:
            raise NVMLError(name) if name in self.refuses else AttributeError(name)

        def call(*arguments):
            self.asked.append((name, *arguments))
            return self.answers[name](*arguments)

        return call
