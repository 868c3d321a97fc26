"""What the kernel says of cgroups, as files."""


def memory_v2(where: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{where}"
    return {
        f"{at}memory.max": f"{limit}\n", f"{at}memory.current": f"{used}\n",
        f"{at}memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }  # fmt: skip
