//! Where the programs of a cluster lie: the cache that scripts/fetch-cluster fills, and the machine.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;

/// The folder's name in the cache; scripts/fetch-cluster says the same.
const FOLDER: &str = "tools/cluster-1.36.3-1";

/// Where Debian puts the CNI plugins.
pub(crate) const CNI_PLUGINS: &str = "/usr/lib/cni";

/// What nodes run that comes from Debian, besides the CNI plugins.
const OF_NODES: [&str; 9] =
    ["containerd", "ctr", "runc", "iptables", "conntrack", "socat", "ip", "nsenter", "unshare"];

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from)
}

/// The folder of builds and tools; scripts/env.sh says the same.
fn cache() -> Result<PathBuf, Error> {
    variable("STOKER_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|it| it.join("stoker")))
        .or_else(|| variable("HOME").map(|it| it.join(".cache/stoker")))
        .ok_or_else(|| missing("a folder for tools", "set STOKER_CACHE or HOME"))
}

pub(crate) fn missing(what: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::Missing { what: what.into(), remedy: remedy.into() }
}

/// A file of the cache's folder for the cluster: a server, kubectl, helm, or an image.
///
/// # Errors
///
/// [`Error::Missing`] if scripts/fetch-cluster did not finish.
pub(crate) fn built(name: &str) -> Result<PathBuf, Error> {
    let folder = cache()?.join(FOLDER);
    let path = folder.join(name);
    if folder.join(".complete").exists() && path.exists() {
        return Ok(path);
    }
    Err(missing(path.display().to_string(), "run scripts/fetch-cluster"))
}

/// etcd, kube-apiserver or kubectl, of KUBEBUILDER_ASSETS if that is set.
pub(crate) fn control_plane(name: &str) -> Result<PathBuf, Error> {
    let Some(folder) = variable("KUBEBUILDER_ASSETS") else {
        return built(name);
    };
    let path = folder.join(name);
    if path.exists() {
        return Ok(path);
    }
    let remedy = "put it there, or unset KUBEBUILDER_ASSETS and run scripts/fetch-cluster";
    Err(missing(path.display().to_string(), remedy))
}

/// The S3 server of scripts/fetch-tools.
pub(crate) fn weed() -> Result<PathBuf, Error> {
    let path = cache()?.join("tools/python-2/bin/weed");
    if path.exists() {
        return Ok(path);
    }
    Err(missing(path.display().to_string(), "run scripts/fetch-tools"))
}

/// Checks that a program of the machine can be found.
pub(crate) fn need(name: &str) -> Result<(), Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|it| it.join(name).exists()) {
        return Ok(());
    }
    Err(missing(format!("the program {name}"), "run scripts/fetch-cluster as root"))
}

/// Checks that this machine can have nodes: root, and what Debian's packages bring.
///
/// # Errors
///
/// [`Error::Missing`] naming the first thing that lacks.
pub(crate) fn need_nodes() -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(missing("root, for network namespaces and containers", "run as root"));
    }
    OF_NODES.iter().try_for_each(|it| need(it))?;
    if !Path::new(CNI_PLUGINS).join("bridge").exists() {
        let what = format!("the CNI plugins in {CNI_PLUGINS}");
        return Err(missing(what, "run scripts/fetch-cluster as root"));
    }
    Ok(())
}

/// A command in a network namespace, or in the process's own. The process it becomes is the program
/// itself: `nsenter` replaces itself by it.
pub(crate) fn inside(namespace: Option<&str>, program: impl AsRef<OsStr>) -> Command {
    let Some(namespace) = namespace else {
        return Command::new(program);
    };
    // Not `ip netns exec`, which mounts /sys anew and so hides the cgroups.
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{namespace}")).arg(program);
    command
}
