//! Tests of `setup`, before a program starts, and `gc`, after its experiment has ended.

use std::os::unix::fs::PermissionsExt as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::process::{Pid, Signal};
use serde_json::json;
use stoker_storage::hash::sha256_hex;

use crate::process::{Pod, until};

/// Creates a pod of an experiment with program files.
fn with_program(sha256: impl Fn(&[u8]) -> String) -> Pod {
    let mut pod = Pod::new();
    let mut archive = tar::Builder::new(GzEncoder::new(vec![], Compression::fast()));
    let program = b"#!/bin/sh\necho trained\n";
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o755);
    header.set_size(program.len() as u64);
    archive.append_data(&mut header, "bin/train", program.as_slice()).unwrap();
    let archive = archive.into_inner().unwrap().finish().unwrap();
    let contexts = pod.file("storage/default/contexts");
    std::fs::create_dir_all(&contexts).unwrap();
    std::fs::write(contexts.join("1.tar.gz"), &archive).unwrap();
    let sha256 = sha256(&archive);
    pod.config["context"] = json!({"path": "default/contexts/1.tar.gz", "sha256": sha256});
    pod
}

#[test]
fn setup_copies_launcher_and_program() {
    let pod = with_program(sha256_hex);
    let shared = pod.file("shared");
    // Repeated, because a container may be restarted.
    for _ in 0..2 {
        let left = pod.run(&format!("setup {}", shared.display()));
        assert_eq!(left.code, 0, "{left:?}");
    }
    let launcher = shared.join("bin/stoker-trainer");
    assert_eq!(launcher.metadata().unwrap().permissions().mode() & 0o777, 0o755);
    let itself = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    assert!(std::fs::read(launcher).unwrap() == itself);
    let left = pod.launch(&[shared.join("context/bin/train").to_str().unwrap()]);
    assert_eq!((left.code, left.out.as_str()), (0, "trained\n"), "{left:?}");
}

#[test]
fn files_with_another_hash_are_refused() {
    let pod = with_program(|_| "0".repeat(64));
    let shared = pod.file("shared");
    let left = pod.run(&format!("setup {}", shared.display()));
    assert_eq!(left.code, 80, "{left:?}");
    let message = left.termination.unwrap().message.unwrap();
    assert!(message.contains("contexts/1.tar.gz has SHA-256"), "{message}");
    assert!(!shared.join("context").exists());
}

#[test]
fn sigterm_ends_setup_in_an_outage() {
    let pod = with_program(sha256_hex);
    let mut pod = pod.env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "hidden");
    // This port refuses connections, which `setup` retries for two minutes.
    pod.config["storage"] = json!({
        "url": "s3://bucket", "endpoint": "http://127.0.0.1:1", "trialPath": "trial",
    });
    let child = pod.start(&format!("setup {}", pod.file("shared").display()));
    until("setup", || {
        let path = format!("/proc/{}/status", child.id());
        let status = std::fs::read_to_string(path).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.is_some_and(|mask| mask & (1 << (Signal::TERM.as_raw() - 1)) != 0)
    });
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let left = pod.wait(child);
    assert_eq!(left.code, 79, "{left:?}");
    assert!(left.errors.contains("preempted before the program was started"), "{left:?}");
}

#[test]
fn listed_checkpoints_are_deleted() {
    let pod = Pod::new();
    let folder = pod.file("storage/trial/checkpoints");
    for name in ["000000000010-0", "000000000020-0", "000000000030-1"] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("manifest.json"), "{}").unwrap();
    }
    let file = pod.file("cleanup.json");
    let cleanup = json!({
        "storage": {"url": pod.file("storage")},
        "delete": [{"trialPath": "trial", "checkpoints": ["000000000010-0"],
                    "keep": ["000000000030-1"], "attemptsOver": 2}],
    });
    std::fs::write(&file, cleanup.to_string()).unwrap();
    let left = pod.run(&format!("gc {}", file.display()));
    assert_eq!(left.code, 0, "{left:?}");
    let names: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["000000000030-1"]);

    std::fs::write(&file, "{}").unwrap();
    let left = pod.run(&format!("gc {}", file.display()));
    assert_eq!(left.code, 80, "{left:?}");
    assert!(
        left.errors.contains("cannot read") && left.errors.contains("cleanup.json"),
        "{left:?}"
    );
}
