//! Values that ranks exchange with the methods of [`Distributed`].

use serde::Deserialize;
use serde_json::{Value, json};

use super::super::*;

/// Runs `act` on two ranks in threads.
fn on_ranks(act: impl Fn(&Distributed) + Sync) {
    let act = &act;
    std::thread::scope(|scope| {
        for rank in ThreadRank::group(2) {
            scope.spawn(move || act(&Distributed::from_collective(Box::new(rank))));
        }
    });
}

#[test]
fn exchanged_floats_keep_their_bits() {
    let nan_with_payload = f64::from_bits(0x7ff8_0000_0000_0007);
    let values = [f64::NAN, f64::INFINITY, -0.0, 0.1, 5e-324, nan_with_payload];
    let bits = |values: [f64; 6]| values.map(f64::to_bits);
    on_ranks(|ranks| {
        let own = values.map(|value| if ranks.rank() == 0 { value } else { -value });
        let all: Vec<_> = ranks.allgather(own).unwrap().into_iter().map(bits).collect();
        assert_eq!(all, [bits(values), bits(values.map(|value| -value))]);
        assert_eq!(bits(ranks.broadcast(own).unwrap()), bits(values));
        let gathered = ranks.gather(f32::NAN).unwrap();
        assert_eq!(gathered.is_some(), ranks.rank() == 0);
        assert!(gathered.into_iter().flatten().all(f32::is_nan));
    });
}

/// Only a self-describing format can decode some of these types.
#[test]
fn exchanged_values_may_have_any_type() {
    #[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
    #[serde(untagged)]
    enum Either {
        Number(f64),
        Text(String),
    }
    #[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
    struct Inner {
        loss: f64,
    }
    #[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
    struct Outer {
        #[serde(flatten)]
        inner: Inner,
        either: Vec<Either>,
        json: Value,
        result: Result<(), String>,
        none: Option<u8>,
    }
    let value = Outer {
        inner: Inner { loss: f64::INFINITY },
        either: vec![Either::Number(f64::NEG_INFINITY), Either::Text("x".repeat(5_000))],
        json: json!({"a": [1, -2, 0.5, null, true, "text"], "large": u64::MAX}),
        result: Err("no".to_owned()),
        none: None,
    };
    on_ranks(|ranks| {
        assert_eq!(ranks.allgather(value.clone()).unwrap(), vec![value.clone(); 2]);
        assert_eq!(ranks.broadcast(value.clone()).unwrap(), value);
    });
}
