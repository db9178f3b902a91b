//! Checks the images that scripts/build-images builds without a container engine: contents,
//! reproducibility, and agreement with the Dockerfiles.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use stoker_tests::{describe_output, has_data, program, repository};

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", describe_output(&output));
    output
}

/// Builds the trainer's image in `folder`. A local CA bundle avoids a download.
fn build(folder: &Path) -> std::path::PathBuf {
    std::fs::write(folder.join("bundle.pem"), "no authority\n").unwrap();
    let mut command = Command::new(repository().join("scripts/build-images"));
    command.args(["--only", "trainer", "--trainer"]).arg(program("stoker-trainer"));
    command.args(["--data", "iris", "--ca-bundle"]).arg(folder.join("bundle.pem"));
    run(command.arg(folder.join("out")));
    folder.join("out/stoker-trainer.tar")
}

fn unpack(archive: &Path, folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    run(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(folder));
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns the manifest and the configuration of an image, and unpacks its files into `root`.
fn open(archive: &Path, folder: &Path, root: &Path) -> (Value, Value) {
    unpack(archive, folder);
    let manifest = read_json(&folder.join("manifest.json"))[0].clone();
    for layer in manifest["Layers"].as_array().unwrap() {
        unpack(&folder.join(layer.as_str().unwrap()), root);
    }
    let config = read_json(&folder.join(manifest["Config"].as_str().unwrap()));
    (manifest, config)
}

#[test]
fn image_builds_are_reproducible() {
    if !has_data("iris") {
        return;
    }
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [one, two] = folders.each_ref().map(|folder| std::fs::read(build(folder.path())).unwrap());
    assert!(one == two, "two builds of the same program differ");
}

#[test]
fn images_contain_a_working_program_and_no_shell() {
    if !has_data("iris") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let archive = build(folder.path());
    let (manifest, config) = open(&archive, &folder.path().join("image"), &root);
    let tag = format!("localhost/stoker-trainer:{}", env!("CARGO_PKG_VERSION"));
    assert_eq!(manifest["RepoTags"], json!([tag]));
    assert_eq!(config["config"]["User"], "65532:65532");
    assert_eq!(config["config"]["Entrypoint"], json!(["/usr/local/bin/stoker-trainer"]));
    assert!(std::fs::read_to_string(root.join("etc/passwd")).unwrap().contains(":65532:"));
    assert!(root.join("etc/ssl/certs/ca-certificates.crt").exists());
    assert!(root.join("usr/local/share/stoker/data/iris/iris.csv.gz").exists());
    for shell in ["bin/sh", "usr/bin/sh", "bin/bash"] {
        assert!(!root.join(shell).exists(), "{shell}");
    }
    assert_runs(&root, "stoker-trainer");
}

/// Checks that the image's program starts with only the image's loader and libraries.
fn assert_runs(root: &Path, name: &str) {
    let inside = |path: &str| root.join(path.trim_start_matches('/'));
    let program = inside(&format!("/usr/local/bin/{name}"));
    let interpreter = run(Command::new("readelf").arg("-l").arg(&program));
    let text = String::from_utf8(interpreter.stdout).unwrap();
    let loader = text.split("interpreter: ").nth(1).unwrap().split(']').next().unwrap();
    let folders: Vec<_> = std::fs::read_dir(inside("/lib"))
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .map(|path| path.display().to_string())
        .collect();
    let start = |option: Option<&str>, argument: Option<&str>| {
        let mut command = Command::new(inside(loader));
        command.args(["--inhibit-cache", "--library-path", &folders.join(":")]);
        run(command.args(option).arg(&program).args(argument))
    };
    let listed = String::from_utf8(start(Some("--list"), None).stdout).unwrap();
    let libraries: Vec<_> = listed.lines().filter_map(|line| line.split("=> /").nth(1)).collect();
    assert!(!libraries.is_empty(), "{listed}");
    for path in libraries {
        assert!(Path::new("/").join(path).starts_with(root), "not in the image: /{path}");
    }
    start(None, Some("--help"));
}

#[test]
fn image_of_the_command_line_serves_the_page() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("bundle.pem"), "no authority\n").unwrap();
    let mut command = Command::new(repository().join("scripts/build-images"));
    command.args(["--only", "stoker", "--stoker"]).arg(program("stoker"));
    command.arg("--ca-bundle").arg(folder.path().join("bundle.pem"));
    run(command.arg(folder.path().join("out")));
    let root = folder.path().join("root");
    let archive = folder.path().join("out/stoker.tar");
    let (manifest, config) = open(&archive, &folder.path().join("image"), &root);
    let tag = format!("localhost/stoker:{}", env!("CARGO_PKG_VERSION"));
    assert_eq!(manifest["RepoTags"], json!([tag]));
    assert_eq!(config["config"]["User"], "65532:65532");
    assert_eq!(config["config"]["Entrypoint"], json!(["/usr/local/bin/stoker"]));
    assert!(!root.join("bin/sh").exists());
    assert_runs(&root, "stoker");
}

/// Returns the text of a Dockerfile, with continued lines joined.
fn dockerfile(name: &str) -> String {
    let path = repository().join("images").join(format!("{name}.Dockerfile"));
    std::fs::read_to_string(path).unwrap().replace("\\\n", " ")
}

#[test]
fn dockerfiles_use_the_pinned_toolchain_without_root() {
    let toolchain = std::fs::read_to_string(repository().join("rust-toolchain.toml")).unwrap();
    let version = toolchain.split('"').nth(1).unwrap();
    for name in ["operator", "stoker", "trainer", "trainer-cuda"] {
        let text = dockerfile(name);
        assert!(text.contains(&format!("FROM rust:{version}-bookworm")), "{name}");
        assert!(text.contains(&format!("RUSTUP_TOOLCHAIN={version}")), "{name}");
        assert!(!text.contains("x86_64"), "{name} does not build for arm64");
        let last = text.rsplit("\nFROM ").next().unwrap();
        assert!(last.contains("\nUSER 65532:65532\n"), "{name}");
    }
}

#[test]
fn dockerfile_and_script_install_the_same_libraries() {
    let script = std::fs::read_to_string(repository().join("scripts/build-images")).unwrap();
    let listed = script.split("more_trainer=(").nth(1).unwrap().split(')').next().unwrap();
    assert!(dockerfile("trainer").contains(listed), "{listed}");
}
