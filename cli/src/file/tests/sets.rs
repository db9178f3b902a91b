//! Tests of `--set`.

use serde_json::json;

use super::{GOOD, check_errors, load_text};

#[test]
fn sets_override_fields_before_validation() {
    let sets = [
        "searcher.random.maxTrials=9",
        "spec.data.dir=/d",
        "metadata.name=other",
        "hyperparameters.rate={const: 0.5}",
        "entrypoint.command[1]=iris",
    ];
    let loaded = load_text(GOOD, &sets).unwrap();
    assert_eq!(loaded.name, "other");
    assert_eq!(loaded.spec_json["searcher"]["random"]["maxTrials"], 9);
    assert_eq!(loaded.spec_json["data"], json!({ "dir": "/d" }));
    assert_eq!(loaded.spec_json["hyperparameters"]["rate"], json!({ "const": 0.5 }));
    assert_eq!(loaded.spec_json["entrypoint"]["command"], json!(["train", "iris"]));

    let invalid = GOOD.replace("epochs: 3", "epochs: 0");
    assert_eq!(load_text(&invalid, &["searcher.maxLength.epochs=2"]).unwrap().valid.units_max, 2);
}

#[test]
fn errors_of_sets_name_the_path() {
    let cases = [
        ("searcher.random.maxTrials=x", "(--set): spec.searcher.random.maxTrials:", "an integer"),
        ("foo", "--set foo: must be PATH=VALUE", "such as"),
        ("a..b=1", "--set a..b=1:", "must start with a path"),
        ("searcher.metric=[1", "--set searcher.metric=[1:", "invalid YAML"),
        ("sercher.single=3", "(--set): spec.sercher:", "did you mean `searcher`?"),
        ("pod.imag.x=3", "(--set): spec.pod.imag:", "did you mean `image`?"),
        ("searcher.metric.x=1", "(--set): spec.searcher.metric:", "no field `x`"),
        ("entrypoint.command[7]=x", "(--set): spec.entrypoint.command:", "has 2 items"),
        ("env[0].name=x", "(--set): spec.env: is unset", "--set 'env=[A, B]'"),
        ("searcher[0]=x", "(--set): spec.searcher:", "is not a list"),
    ];
    for (set, start, words) in cases {
        check_errors(GOOD, &[set], &[(start, words)]);
    }
}
