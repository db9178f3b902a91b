#!/usr/bin/env python3
"""Creates the root directories of Stoker's images, and images without a container engine.

  image.py rootfs PROGRAM NAME CA_BUNDLE OUT [LIBRARY...]    contents: OUT/base and OUT/program
  image.py archive NAME:TAG PROGRAM OUT.tar LAYER...         docker-archive of layers (directories)

The Dockerfiles in this directory call `rootfs`; scripts/build-images calls both. The images have
the same contents either way. The same input gives the same bytes. Requires only Python's standard
library.
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
    "etc/passwd": "root:x:0:0:root:/:/sbin/nologin\n"
    f"stoker:x:{USER}:{USER}:stoker:/tmp:/sbin/nologin\n",
    "etc/group": f"root:x:0:\nstoker:x:{USER}:\n",
    # Names are resolved with /etc/hosts, which contains the pod's name, and then with DNS.
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
CA_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
# e_machine of an ELF header, and the architecture's name in images.
ARCHITECTURES = {62: "amd64", 183: "arm64"}


class ImageError(Exception):
    """The image cannot be created. Contains cause and remedy."""


def libraries(program):
    """Returns the paths of a program's shared libraries and of its loader."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}
    environment["LC_ALL"] = "C"
    result = subprocess.run(["ldd", program], env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        text = result.stdout + result.stderr
        if "not a dynamic executable" in text or "statically linked" in result.stdout:
            return []
        raise ImageError(f"ldd {program}: {result.stderr.strip() or result.stdout.strip()}")
    paths = []
    for line in result.stdout.splitlines():
        if "not found" in line:
            raise ImageError(f"{program} needs {line.strip()}; install the library or link statically")
        path = re.search(r"(/\S+) \(0x", line)
        if path:
            paths.append(path.group(1))
    return paths


def architecture(program):
    """Returns a program's architecture by its name in images."""
    with open(program, "rb") as file:
        head = file.read(20)
    machine = int.from_bytes(head[18:20], "little")
    if head[:4] != b"\x7fELF" or machine not in ARCHITECTURES:
        names = " or ".join(ARCHITECTURES.values())
        raise ImageError(f"{program} is not a Linux program for {names}")
    return ARCHITECTURES[machine]


def copy(source, root, path, mode):
    """Copies a file to a path below root; follows links."""
    target = os.path.join(root, path.lstrip("/"))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, mode)


def find_beside(paths, name):
    """Returns the path of an additional library in the directories of the program's libraries."""
    directories = sorted({os.path.dirname(path) for path in paths})
    merged = [directory.replace("/lib/", "/usr/lib/") for directory in directories]
    for directory in directories + merged:
        if os.path.exists(os.path.join(directory, name)):
            return os.path.join(directory, name)
    raise ImageError(f"{name} not found in {', '.join(directories)}; install the library")


def rootfs(program, name, ca_bundle, out, more):
    """Fills out/base with the common files, and out/program with one program and its libraries.

    The libraries are those of this machine, with which the program was linked. `more` names
    additional libraries for users' programs. The image has neither a shell nor a package manager.
    """
    architecture(program)
    paths = libraries(program)
    paths += [path for path in (find_beside(paths, name) for name in more) if path not in paths]
    shutil.rmtree(out, ignore_errors=True)
    base, program_root = os.path.join(out, "base"), os.path.join(out, "program")
    for path, text in FILES.items():
        target = os.path.join(base, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(target, 0o644)
    os.makedirs(os.path.join(base, "tmp"))
    os.chmod(os.path.join(base, "tmp"), 0o1777)
    copy(ca_bundle, base, CA_BUNDLE, 0o644)
    for library in paths:
        copy(library, program_root, library, 0o755)
    copy(program, program_root, f"usr/local/bin/{name}", 0o755)
    # Keep symbols, so that a backtrace names functions. Line numbers take a third of the file.
    installed = os.path.join(program_root, "usr/local/bin", name)
    strip = ["strip", "--strip-debug", "--enable-deterministic-archives", installed]
    if subprocess.run(strip, check=False).returncode != 0:
        raise ImageError(f"strip failed on {program}; install binutils")


def entry(path, name):
    """Returns a tar entry with only the permission and sticky bits: no owner and no time."""
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
        raise ImageError(f"{path} is neither a file, a directory nor a link; remove it")
    return info


def layer(root, out):
    """Writes a directory as a layer. Returns the layer's SHA-256 in hex."""
    with tarfile.open(out, "w", format=tarfile.USTAR_FORMAT) as tar:
        for directory, directories, files in os.walk(root):
            directories.sort()
            for name in sorted(directories + files):
                path = os.path.join(directory, name)
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
    """Writes an image that starts a program, in the format of `docker save`."""
    digests = []
    for index, root in enumerate(roots):
        digests.append(layer(root, f"{out}.layer{index}"))
    name = os.path.join("usr/local/bin", program)
    [program_root] = [root for root in roots if os.path.exists(os.path.join(root, name))]
    config = json.dumps({
        "architecture": architecture(os.path.join(program_root, name)),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Entrypoint": ["/" + name],
            "User": f"{USER}:{USER}",
            "WorkingDir": "/",
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
        },
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + digest for digest in digests]},
        "history": [{"created": "1970-01-01T00:00:00Z"} for _ in digests],
    }).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    layers = [digest + "/layer.tar" for digest in digests]
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    except (ImageError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
