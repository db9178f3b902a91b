//! `scripts/run` announces a long build, and prints nothing if there is nothing to build.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use stoker_tests::{describe_output, repository};

/// Replaces cargo: prints its arguments, and "builds" a program that prints its arguments.
const CARGO: &str = r#"#!/usr/bin/env bash
echo "cargo $*"
mkdir -p "$CARGO_TARGET_DIR/debug"
for program in stoker stoker-trainer example-gang; do
    printf '#!/usr/bin/env bash\necho "%s $*"\n' "$program" >"$CARGO_TARGET_DIR/debug/$program"
    chmod +x "$CARGO_TARGET_DIR/debug/$program"
done
"#;

#[test]
fn run_announces_the_build_of_missing_programs() {
    let folder = tempfile::tempdir().unwrap();
    let cargo = folder.path().join("cargo");
    std::fs::write(&cargo, CARGO).unwrap();
    std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let target = folder.path().join("target");
    let check = |file: &str, programs: &str, announced: &str| {
        let output = Command::new(repository().join("scripts/run"))
            .args([file, "--fresh"])
            .current_dir(repository())
            .env("PATH", format!("{}:{path}", folder.path().display()))
            .env("STOKER_CACHE", folder.path())
            .env("CARGO_TARGET_DIR", &target)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", describe_output(&output));
        let build = format!("cargo build --quiet --workspace {programs}");
        let expected = format!("{build}\nstoker run {file} --fresh\n");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
        assert_eq!(String::from_utf8(output.stderr).unwrap(), announced);
    };

    let (search, gang) = ("examples/search/experiment.yaml", "examples/gang/experiment.yaml");
    let gang_programs = "--bin=stoker --bin=stoker-trainer --bin=example-gang";
    let time = "with an empty cache, this takes about 15 to 25 minutes on two cores";
    check(gang, gang_programs, &format!("building stoker stoker-trainer example-gang; {time}\n"));
    check(gang, gang_programs, "");
    let search_programs = "--bin=stoker --bin=stoker-trainer --bin=example-search";
    check(search, search_programs, &format!("building example-search; {time}\n"));
}
