//! Exchanges weights in PyTorch's layout with the Python library of safetensors.

use std::path::Path;
use std::process::Command;

use stoker_tests::describe_output;
use stoker_trainer::burn::module::Module;
use stoker_trainer::burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use stoker_trainer::burn::tensor::{Device, Tensor, TensorData, activation};
use stoker_trainer::{WeightsFile, burn};

use crate::readers::tool;

/// Computes PyTorch's `Linear` and `LayerNorm` with the weights of a file, then with random weights
/// that it saves.
const CHECK: &str = r#"
import json, sys
import numpy
from safetensors.numpy import load_file, save_file

def forward(w, x):
    x = x @ w["hidden.weight"].T + w["hidden.bias"]
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    x = (x - mean) / numpy.sqrt(var + 1e-5) * w["norm.weight"] + w["norm.bias"]
    return numpy.maximum(x, 0) @ w["output.weight"].T + w["output.bias"]

theirs, own = sys.argv[1:3]
x, expected = json.loads(sys.argv[3]), json.loads(sys.argv[4])
w = load_file(theirs)
assert {k: v.shape for k, v in w.items()} == {
    "hidden.weight": (5, 3), "hidden.bias": (5,), "norm.weight": (5,), "norm.bias": (5,),
    "output.weight": (2, 5), "output.bias": (2,)}, {k: v.shape for k, v in w.items()}
x = numpy.array(x, dtype=numpy.float32)
y = forward(w, x)
assert numpy.allclose(y, expected, atol=1e-5), (y, expected)
random = numpy.random.default_rng(7)
w = {k: random.normal(size=v.shape).astype(numpy.float32) for k, v in w.items()}
save_file(w, own)
print(json.dumps(forward(w, x).tolist()))
"#;

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    norm: LayerNorm,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(3, 5).init(device),
            norm: LayerNormConfig::new(5).init(device),
            output: LinearConfig::new(5, 2).init(device),
        }
    }

    fn forward(&self, x: &[[f32; 3]]) -> Vec<Vec<f32>> {
        let data = TensorData::new(x.concat(), [x.len(), 3]);
        let x = Tensor::<2>::from_data(data, &Device::flex());
        let x = activation::relu(self.norm.forward(self.hidden.forward(x)));
        let y: Vec<f32> = self.output.forward(x).into_data().try_to_vec().unwrap();
        y.chunks(2).map(<[f32]>::to_vec).collect()
    }
}

#[test]
fn exported_and_imported_weights_match_pytorch_layout() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (theirs, own) = (path("theirs.safetensors"), path("own.safetensors"));
    let net = Net::new(&Device::flex());
    let x = [[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]];
    WeightsFile::new(&theirs).pytorch().export(&net).unwrap();
    let output = Command::new(tool("python"))
        .args(["-c", CHECK, &theirs, &own])
        .arg(serde_json::to_string(&x).unwrap())
        .arg(serde_json::to_string(&net.forward(&x)).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    let expected: Vec<Vec<f32>> = serde_json::from_slice(&output.stdout).unwrap();
    let imported = WeightsFile::from(Path::new(&own)).pytorch().import(net).unwrap();
    for (actual, expected) in imported.forward(&x).concat().iter().zip(expected.concat()) {
        assert!((actual - expected).abs() < 1e-4, "{actual} {expected}");
    }
}
