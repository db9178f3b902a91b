//! The images that are made without a container engine: whole, repeatable, and as the Dockerfiles
//! say.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use stoker_tests::{has_data, program, repository, said};

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", said(&output));
    output
}

/// Makes the trainer's image in `folder`, with a bundle of its own so that nothing is fetched.
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

/// The image's configuration, and its files unpacked into `root`.
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
fn the_same_program_gives_the_same_bytes() {
    if !has_data("iris") {
        return;
    }
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [one, two] = folders.each_ref().map(|it| std::fs::read(build(it.path())).unwrap());
    assert!(one == two);
}

#[test]
fn an_image_holds_a_program_that_runs_and_no_shell() {
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
    assert_runs(&root);
}

/// Starts the image's program by the image's loader, with the image's libraries alone.
fn assert_runs(root: &Path) {
    let inside = |path: &str| root.join(path.trim_start_matches('/'));
    let program = inside("/usr/local/bin/stoker-trainer");
    let interpreter = run(Command::new("readelf").arg("-l").arg(&program));
    let text = String::from_utf8(interpreter.stdout).unwrap();
    let loader = text.split("interpreter: ").nth(1).unwrap().split(']').next().unwrap();
    let folders: Vec<_> = std::fs::read_dir(inside("/lib"))
        .unwrap()
        .flatten()
        .map(|it| it.path())
        .filter(|it| it.is_dir())
        .map(|it| it.display().to_string())
        .collect();
    let started = |option: Option<&str>, argument: Option<&str>| {
        let mut command = Command::new(inside(loader));
        command.args(["--inhibit-cache", "--library-path", &folders.join(":")]);
        run(command.args(option).arg(&program).args(argument))
    };
    let listed = String::from_utf8(started(Some("--list"), None).stdout).unwrap();
    let found: Vec<_> = listed.lines().filter_map(|it| it.split("=> /").nth(1)).collect();
    assert!(!found.is_empty(), "{listed}");
    for path in found {
        assert!(Path::new("/").join(path).starts_with(root), "not in the image: /{path}");
    }
    started(None, Some("--help"));
}

/// The text of a Dockerfile, with lines that go on joined.
fn dockerfile(name: &str) -> String {
    let path = repository().join("images").join(format!("{name}.Dockerfile"));
    std::fs::read_to_string(path).unwrap().replace("\\\n", " ")
}

#[test]
fn the_dockerfiles_use_the_toolchain_of_the_repository_and_no_root() {
    let toolchain = std::fs::read_to_string(repository().join("rust-toolchain.toml")).unwrap();
    let version = toolchain.split('"').nth(1).unwrap();
    for name in ["operator", "trainer", "trainer-cuda"] {
        let text = dockerfile(name);
        assert!(text.contains(&format!("FROM rust:{version}-bookworm")), "{name}");
        assert!(text.contains(&format!("RUSTUP_TOOLCHAIN={version}")), "{name}");
        let last = text.rsplit("\nFROM ").next().unwrap();
        assert!(last.contains("\nUSER 65532:65532\n"), "{name}");
    }
}

#[test]
fn the_trainer_has_the_same_libraries_however_it_is_made() {
    let script = std::fs::read_to_string(repository().join("scripts/build-images")).unwrap();
    let listed = script.split("more_trainer=(").nth(1).unwrap().split(')').next().unwrap();
    assert!(dockerfile("trainer").contains(listed), "{listed}");
}
