//! docs/scenarios.md names tests that are there.

use std::path::Path;

use stoker_tests::repository;

/// The text of every file of the crates' tests and sources.
fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|it| it == "rs") {
            *text += &std::fs::read_to_string(&path).unwrap();
        }
    }
}

#[test]
fn every_test_of_a_scenario_is_there() {
    let page = std::fs::read_to_string(repository().join("docs/scenarios.md")).unwrap();
    let mut text = String::new();
    for name in ["api", "engine", "operator", "cli", "storage", "trainer", "tests"] {
        sources(&repository().join(name), &mut text);
    }
    let rows: Vec<&str> = page.lines().filter(|it| it.starts_with("| ")).skip(1).collect();
    for number in ["8", "9", "27", "28", "29", "30", "31", "32", "33", "34", "35"] {
        assert!(rows.iter().any(|it| it.starts_with(&format!("| {number} |"))), "no row {number}");
    }
    for row in rows {
        let named = row.rsplit(" | ").next().unwrap().split('`').skip(1).step_by(2);
        for test in named {
            assert!(text.contains(&format!("fn {test}()")), "{test} is not there:\n{row}");
        }
    }
}
