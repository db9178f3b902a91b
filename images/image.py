#!/usr/bin/env python3
"""Makes the root folder of Stoker's images, and images of root folders without a container engine.

  image.py rootfs PROGRAM NAME CA_BUNDLE OUT [LIBRARY...]    what an image holds: OUT/base and OUT/program
  image.py archive NAME:TAG PROGRAM OUT.tar LAYER...         a docker-archive of layers, each a folder

The Dockerfiles beside this file call `rootfs`, scripts/build-images calls both: the images are the same either way.
Same input, same bytes. Python's standard library is all that is needed.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile

USER = 65532
FILES = {
    "etc/passwd": f"root:x:0:0:root:/:/sbin/nologin\nstoker:x:{USER}:{USER}:stoker:/tmp:/sbin/nologin\n",
    "etc/group": f"root:x:0:\nstoker:x:{USER}:\n",
    # Names are looked up in /etc/hosts, which holds the pod's own, and then by DNS.
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
CA_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
# e_machine of an ELF header, and what images call it.
ARCHITECTURES = {62: "amd64", 183: "arm64"}


class Refused(Exception):
    """What was asked for cannot be made; says why and what to do."""


def libraries(program):
    """Paths of the shared libraries of a program, its loader among them, as the loader finds them."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}
    told = subprocess.run(["ldd", program], env=environment | {"LC_ALL": "C"}, capture_output=True, text=True)
    if told.returncode != 0:
        if "not a dynamic executable" in told.stdout + told.stderr or "statically linked" in told.stdout:
            return []
        raise Refused(f"ldd {program}: {told.stderr.strip() or told.stdout.strip()}")
    found = []
    for line in told.stdout.splitlines():
        if "not found" in line:
            raise Refused(f"{program} needs {line.strip()}; install the library, or link it in")
        path = re.search(r"(/\S+) \(0x", line)
        if path:
            found.append(path.group(1))
    return found


def architecture(program):
    """The processor that a program is for, as images call it."""
    with open(program, "rb") as file:
        head = file.read(20)
    machine = int.from_bytes(head[18:20], "little")
    if head[:4] != b"\x7fELF" or machine not in ARCHITECTURES:
        raise Refused(f"{program} is no Linux program for {' or '.join(ARCHITECTURES.values())}")
    return ARCHITECTURES[machine]


def place(source, root, path, mode):
    """Copies a file, through links, to a path below root."""
    target = os.path.join(root, path.lstrip("/"))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, mode)


def beside(found, name):
    """The path of a library that the program does not need, next to those that it does."""
    folders = sorted({os.path.dirname(it) for it in found})
    for folder in folders + [it.replace("/lib/", "/usr/lib/") for it in folders]:
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    raise Refused(f"{name} is not in {', '.join(folders)}; install the library")


def rootfs(program, name, ca_bundle, out, more):
    """Fills out/base with what every image needs, and out/program with one program and its libraries.

    The libraries are those of this machine: the ones that the program was linked with; `more` names others that are
    to be there for programs of users. There is no shell, and no package manager.
    """
    architecture(program)
    found = libraries(program)
    found += [path for path in (beside(found, it) for it in more) if path not in found]
    shutil.rmtree(out, ignore_errors=True)
    base, own = os.path.join(out, "base"), os.path.join(out, "program")
    for path, text in FILES.items():
        target = os.path.join(base, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(target, 0o644)
    os.makedirs(os.path.join(base, "tmp"))
    os.chmod(os.path.join(base, "tmp"), 0o1777)
    place(ca_bundle, base, CA_BUNDLE, 0o644)
    for library in found:
        place(library, own, library, 0o755)
    place(program, own, f"usr/local/bin/{name}", 0o755)
    # Symbols stay, so that a backtrace names functions; it loses the lines, which take a third of the file.
    strip = ["strip", "--strip-debug", "--enable-deterministic-archives", os.path.join(own, "usr/local/bin", name)]
    if subprocess.run(strip, check=False).returncode != 0:
        raise Refused(f"strip failed on {program}; install binutils")


def entry(path, name):
    """A tar entry that says nothing of this machine: no owner, no time, no mode but rwx and sticky."""
    status = os.lstat(path)
    info = tarfile.TarInfo(name)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        info.mode = 0o1777 if mode & stat.S_ISVTX else 0o755
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
    elif stat.S_ISREG(status.st_mode):
        info.size, info.mode = status.st_size, 0o755 if mode & 0o111 else 0o644
    else:
        raise Refused(f"{path} is neither file, folder nor link; images hold nothing else")
    return info


def layer(root, out):
    """Writes a folder as a layer; returns the SHA-256 of it, in hex."""
    with tarfile.open(out, "w", format=tarfile.USTAR_FORMAT) as tar:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(folders + files):
                path = os.path.join(folder, name)
                info = entry(path, os.path.relpath(path, root))
                if info.isreg():
                    with open(path, "rb") as file:
                        tar.addfile(info, file)
                else:
                    tar.addfile(info)
    digest = hashlib.sha256()
    with open(out, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def archive(tag, program, out, roots):
    """Writes an image that starts a program, as `docker save` would: what ctr, docker, podman and skopeo read."""
    digests = []
    for index, root in enumerate(roots):
        digests.append(layer(root, f"{out}.layer{index}"))
    name = os.path.join("usr/local/bin", program)
    [found] = [root for root in roots if os.path.exists(os.path.join(root, name))]
    config = json.dumps({
        "architecture": architecture(os.path.join(found, name)),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Entrypoint": ["/" + name],
            "User": f"{USER}:{USER}",
            "WorkingDir": "/",
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
        },
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + it for it in digests]},
        "history": [{"created": "1970-01-01T00:00:00Z"} for _ in digests],
    }).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    layers = [it + "/layer.tar" for it in digests]
    manifest = json.dumps([{"Config": config_name, "RepoTags": [tag], "Layers": layers}]).encode()
    with tarfile.open(out + ".part", "w", format=tarfile.USTAR_FORMAT) as tar:
        for entry_name, data in [(config_name, config), ("manifest.json", manifest)]:
            info = tarfile.TarInfo(entry_name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for index, entry_name in enumerate(layers):
            if entry_name in layers[:index]:
                continue
            info = tarfile.TarInfo(entry_name)
            info.size = os.path.getsize(f"{out}.layer{index}")
            with open(f"{out}.layer{index}", "rb") as file:
                tar.addfile(info, file)
    for index in range(len(roots)):
        os.remove(f"{out}.layer{index}")
    os.replace(out + ".part", out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("rootfs")
    for argument in ["program", "name", "ca_bundle", "out"]:
        command.add_argument(argument)
    command.add_argument("more", nargs="*", metavar="library")
    command = commands.add_parser("archive")
    for argument in ["tag", "program", "out"]:
        command.add_argument(argument)
    command.add_argument("roots", nargs="+")
    arguments = vars(parser.parse_args())
    try:
        {"rootfs": rootfs, "archive": archive}[arguments.pop("command")](**arguments)
    except (Refused, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
