//! Constrained texts, and constraints that are made to break the server.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{
    client::{Server, Settings},
    faults::is_well,
};

/// A field of a request with a constraint in which `n` definitions refer to the next one each.
type Chain = fn(n: usize) -> Value;

/// Returns a short name, so that a constraint of a given size has many definitions.
fn name(i: usize) -> String {
    [i / 676, i / 26 % 26, i % 26]
        .map(|letter| char::from(b'a' + (letter % 26) as u8))
        .iter()
        .collect()
}

fn references(n: usize) -> Value {
    let definition = |i: usize| match i == n {
        true => json!({"type": "integer"}),
        false => json!({"$ref": format!("#/$defs/{}", name(i + 1))}),
    };
    let definitions = (0..=n).map(|i| (name(i), definition(i)));
    let definitions: serde_json::Map<String, Value> = definitions.collect();
    json!({"guided_json": {"$ref": "#/$defs/aaa", "$defs": definitions}})
}

/// Returns a grammar of rules, which have names in lower case.
fn rules(n: usize) -> Value {
    let mut lark = String::from("start: aaa\n");
    for i in 0..n {
        writeln!(lark, "{}:{}", name(i), name(i + 1)).unwrap();
    }
    json!({"guided_grammar": format!("{lark}{}: \"x\"\n", name(n))})
}

/// Returns a grammar of tokens, which have names in upper case.
fn tokens(n: usize) -> Value {
    let lark = rules(n)["guided_grammar"].as_str().unwrap().to_uppercase();
    json!({"guided_grammar": lark.replacen("START", "start", 1)})
}

fn conditions(n: usize) -> Value {
    let (open, close) = ("not(".repeat(n), ")".repeat(n));
    let rule = format!("a::_ : \"x\" a::incr(_) %if {open}true{close}\n | \"y\"\n");
    json!({"guided_grammar": format!("start: a::0x0\n{rule}")})
}

/// llguidance compiles each of these recursively, and a stack that overflows ends the process.
#[test]
fn chains_of_definitions_overflow_no_stack() {
    let server = Server::new(Settings::default());
    let ask = |fields: Value| {
        let mut body = json!({"prompt": "She", "max_tokens": 1, "temperature": 0});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        server.post("/v1/completions", &body)
    };
    // The largest number of each is just below a limit.
    let chains: [(Chain, usize); 4] =
        [(references, 2000), (rules, 8000), (tokens, 8000), (conditions, 1000)];
    for (chain, most) in chains {
        for n in [most / 2, most] {
            let response = ask(chain(n));
            assert!([200, 400].contains(&response.status), "{n}: {response:?}");
            assert!(!response.body.contains("may have"), "{n}: {response:?}");
            is_well(&server);
        }
        for n in [3 * most, 20 * most] {
            let refused = ask(chain(n));
            assert_eq!(refused.status, 400, "{n}: {refused:?}");
            assert!(refused.body.contains("may have"), "{n}: {refused:?}");
            is_well(&server);
        }
    }
    for (chain, _) in &chains[..3] {
        assert_eq!(ask(chain(10)).status, 200);
    }
    for large in [
        json!({"guided_regex": "a".repeat(70_000)}),
        json!({"guided_choice": vec!["a".repeat(100); 700]}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {
            "enum": ["a".repeat(70_000)]}}}}),
    ] {
        let refused = ask(large);
        assert_eq!(refused.status, 400, "{refused:?}");
        assert!(refused.body.contains("65536"), "{refused:?}");
    }
    is_well(&server);
}

/// Returns a tool as Pydantic describes one: its argument is a definition of the schema.
fn tool(name: &str, kinds: &[&str]) -> Value {
    let guest = json!({
        "type": "object", "properties": {"kind": {"enum": kinds}}, "required": ["kind"],
        "additionalProperties": false,
    });
    let schema = json!({
        "type": "object", "properties": {"guest": {"$ref": "#/$defs/Guest"}},
        "required": ["guest"], "additionalProperties": false, "$defs": {"Guest": guest},
    });
    json!({"type": "function", "function": {"name": name, "parameters": schema}})
}

/// Required calls have the schemas of their tools, whose definitions have equal names.
#[test]
fn calls_have_the_schema_of_their_tool() {
    let server = Server::new(Settings { context: 1024, ..Settings::default() });
    // White space between the parts of JSON is allowed, and the model of the tests likes it.
    let is_white = |id: &u32| {
        let bytes = server.app.tokenizer.token_bytes(*id).unwrap_or_default();
        bytes.iter().any(u8::is_ascii_whitespace)
    };
    let bias = (0..server.app.n_ids as u32).filter(is_white);
    let bias: serde_json::Map<String, Value> =
        bias.map(|id| (id.to_string(), json!(-100))).collect();
    let ask = |choice: Value, change: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "Who comes?"}], "temperature": 0,
            "tools": [tool("visit", &["lady", "sir"]), tool("leave", &["cat", "dog"])],
            "tool_choice": choice, "max_tokens": 150, "logit_bias": bias,
        });
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    let called = |choice: &Value| {
        let function = &choice["message"]["tool_calls"][0]["function"];
        let arguments = function["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        (function["name"].clone(), arguments["guest"]["kind"].clone())
    };
    let one = |name: &str| json!({"type": "function", "function": {"name": name}});
    for (name, kinds) in [("visit", ["lady", "sir"]), ("leave", ["cat", "dog"])] {
        let answer = ask(one(name), json!({})).ok();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let (called, kind) = called(choice);
        assert_eq!(called, name);
        assert!(kinds.iter().any(|it| kind == **it), "{answer}");
    }
    let whole = ask(json!("required"), json!({})).ok();
    let (name, kind) = called(&whole["choices"][0]);
    let kinds = if name == "visit" { ["lady", "sir"] } else { ["cat", "dog"] };
    assert!(kinds.iter().any(|it| kind == **it), "{whole}");

    // Without its last token, which ends the text, the answer has its call and was cut.
    let n = whole["usage"]["completion_tokens"].as_u64().unwrap() - 1;
    let cut = ask(json!("required"), json!({"max_tokens": n})).ok();
    assert_eq!(called(&cut["choices"][0]), (name, kind));
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    let events = ask(json!("required"), json!({"max_tokens": n, "stream": true})).events();
    let last = &events.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"], "length");
    assert!(events.iter().any(|it| it["choices"][0]["delta"]["tool_calls"].is_array()));

    let large = json!({"tools": [tool("visit", &[&"a".repeat(70_000)])]});
    let refused = ask(json!("required"), large);
    assert_eq!(refused.status, 400, "{refused:?}");
    is_well(&server);
}
