//! Detection of the GPUs that local processes may use.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use stoker_api::experiment::EnvVar;
use stoker_api::names::ENV_DEVICE;
use stoker_engine::devices::GpuPool;
use tokio::process::Command;
use tokio::time::timeout;

/// Environment variable with the GPUs that a process sees, in order.
pub(crate) const ENV_VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// Directory in which the NVIDIA driver describes each GPU.
const DRIVER: &str = "/proc/driver/nvidia/gpus";
/// Longest wait for `nvidia-smi`, which may hang if the driver fails.
const LIST_MAX: Duration = Duration::from_secs(20);

/// Returns the GPUs that programs with these variables may use: those in `CUDA_VISIBLE_DEVICES` if
/// it is set, otherwise all of this machine. Returns none if `STOKER_DEVICE` is `cpu`.
pub(crate) async fn detect(env: &[EnvVar]) -> GpuPool {
    let set = |name: &str| {
        let from_spec = env.iter().rfind(|var| var.name == name).map(|var| var.value.clone());
        from_spec.or_else(|| std::env::var(name).ok())
    };
    if set(ENV_DEVICE).as_deref() == Some("cpu") {
        return GpuPool::default();
    }
    GpuPool::new(match set(ENV_VISIBLE) {
        Some(visible) => parse_visible(&visible),
        None => match list().await {
            Some(text) => parse_list(&text),
            None => read_driver(Path::new(DRIVER)),
        },
    })
}

/// Parses `CUDA_VISIBLE_DEVICES` as CUDA does: entries after an invalid one are ignored.
fn parse_visible(text: &str) -> Vec<String> {
    let is_valid = |name: &&str| {
        let is_index = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        is_index || name.starts_with("GPU-") || name.starts_with("MIG-")
    };
    text.split(',').map(str::trim).take_while(is_valid).map(str::to_owned).collect()
}

/// Runs `nvidia-smi -L`; `None` if it is not installed or fails.
async fn list() -> Option<String> {
    let mut command = Command::new("nvidia-smi");
    command.arg("-L").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = timeout(LIST_MAX, command.output()).await.ok()?.ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses the output of `nvidia-smi -L`. A partitioned GPU is replaced by its MIG partitions.
fn parse_list(text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for line in text.lines() {
        let Some((_, rest)) = line.split_once("(UUID: ") else { continue };
        let name = rest.trim_end().trim_end_matches(')').to_owned();
        let is_part = name.starts_with("MIG-");
        if is_part && names.last().is_some_and(|last| last.starts_with("GPU-")) {
            names.pop();
        }
        names.push(name);
    }
    names
}

/// Returns the GPUs that the driver describes: UUIDs, or indexes if a UUID is unavailable.
fn read_driver(folder: &Path) -> Vec<String> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("information"))
        .collect();
    // Sorts by PCI address, which is the name of each directory.
    paths.sort();
    let uuid = |path: &std::path::PathBuf| {
        let text = std::fs::read_to_string(path).ok()?;
        let uuid = text.lines().find_map(|line| line.strip_prefix("GPU UUID:"))?.trim();
        (!uuid.contains('?')).then(|| uuid.to_owned())
    };
    let uuids: Option<Vec<String>> = paths.iter().map(uuid).collect();
    uuids.unwrap_or_else(|| (0..paths.len()).map(|index| index.to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_end_at_an_invalid_entry() {
        let check = |text, expected: &[&str]| assert_eq!(parse_visible(text), expected, "{text}");
        check("", &[]);
        check("-1", &[]);
        check("NoDevFiles", &[]);
        check("0", &["0"]);
        check("2, 0", &["2", "0"]);
        check("0,-1,1", &["0"]);
        check("GPU-5e1f,MIG-ab/1/0", &["GPU-5e1f", "MIG-ab/1/0"]);
    }

    #[test]
    fn gpus_are_listed_by_uuid_with_their_partitions() {
        let text = "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n\
                    GPU 1: NVIDIA H200 (UUID: GPU-bb)\n  \
                    MIG 1g.18gb     Device  0: (UUID: MIG-b0)\n  \
                    MIG 1g.18gb     Device  1: (UUID: MIG-b1)\n\
                    GPU 2: NVIDIA H200 (UUID: GPU-cc)\n";
        assert_eq!(parse_list(text), ["GPU-aa", "MIG-b0", "MIG-b1", "GPU-cc"]);
        assert!(parse_list("No devices found.\n").is_empty());
    }

    #[test]
    fn driver_files_give_uuids_or_indexes() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read_driver(&folder.path().join("missing")).is_empty());
        for (address, uuid) in [("0000:41:00.0", "GPU-b"), ("0000:01:00.0", "GPU-a")] {
            let gpu = folder.path().join(address);
            std::fs::create_dir(&gpu).unwrap();
            let text = format!("Model: \t\t NVIDIA\nGPU UUID: \t {uuid}\nDevice Minor: \t 0\n");
            std::fs::write(gpu.join("information"), text).unwrap();
        }
        assert_eq!(read_driver(folder.path()), ["GPU-a", "GPU-b"]);
        let hidden = folder.path().join("0000:01:00.0/information");
        std::fs::write(hidden, "GPU UUID: \t GPU-????????-????\n").unwrap();
        assert_eq!(read_driver(folder.path()), ["0", "1"]);
    }
}
