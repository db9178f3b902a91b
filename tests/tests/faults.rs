//! What is under a run fails, or its file is wrong: the end is clear.

use std::path::{Path, PathBuf};
use std::process::Command;

use stoker_tests::{repository, said};

use crate::first_light::run;

/// A small file system of its own, gone with the test. Mounting one needs root.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, bytes: u32) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let size = format!("size={bytes}");
        let output =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at).output();
        let output = output.unwrap();
        assert!(output.status.success(), "mounting needs root: {}", said(&output));
        Self(at.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn example(name: &str) -> PathBuf {
    repository().join("examples").join(name).join("const.yaml")
}

#[test]
fn a_full_disk_ends_the_run_and_names_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("disk");
    let _disk = SmallDisk::mount(&root, 256 * 1024);
    let set = ["--set", "searcher.maxLength={batches: 5}"];
    let output = run(&example("cifar10"), &root, &set);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let text = said(&output);
    assert!(text.contains("is full"), "{text}");
    assert!(text.contains("free some space or choose another root"), "{text}");
}

#[test]
fn a_file_with_mistakes_is_refused_with_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.yaml");
    let text = std::fs::read_to_string(example("iris")).unwrap();
    let text =
        text.replace("metric:", "metrik:").replace("single: {}", "single: {}\n    random: {}");
    std::fs::write(&file, text).unwrap();
    let output = run(&file, folder.path(), &[]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    let text = said(&output);
    for part in ["metrik", "metric", "maxTrials"] {
        assert!(text.contains(part), "{part} is not named: {text}");
    }
}
